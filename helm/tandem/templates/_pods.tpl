{{/* Templates of the pods, which are the same in a StatefulSet and in KubeRay's RayCluster. */}}
{{- define "tandem.headPod" -}}
metadata:
  labels:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
    app.kubernetes.io/component: head
  annotations:
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccountName" . }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "tandem.podSecurityContext" . | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: head
      image: {{ include "tandem.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [bash, /etc/tandem/head.sh]
      {{- include "tandem.environment" . | nindent 6 }}
      ports:
        - name: http
          containerPort: {{ .Values.router.port }}
        - name: gcs
          containerPort: 6379
      startupProbe: # allows for the time to fetch the model and to start the workers
        httpGet: {path: /health, port: http, scheme: {{ include "tandem.scheme" . | upper }}}
        periodSeconds: 5
        failureThreshold: {{ div .Values.startupTimeoutSeconds 5 }}
      livenessProbe:
        httpGet: {path: /health, port: http, scheme: {{ include "tandem.scheme" . | upper }}}
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe: # ready means that a real generation succeeded
        httpGet: {path: /ready, port: http, scheme: {{ include "tandem.scheme" . | upper }}}
        periodSeconds: 5
        timeoutSeconds: 5
      securityContext:
        {{- include "tandem.containerSecurityContext" . | nindent 8 }}
      resources:
        {{- toYaml .Values.head.resources | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" . | nindent 8 }}
        {{- if .Values.apiKeys.existingSecret }}
        - name: api-keys
          mountPath: /etc/tandem-api-keys
          readOnly: true
        {{- end }}
        {{- if .Values.tls.existingSecret }}
        - name: tls
          mountPath: /etc/tandem-tls
          readOnly: true
        {{- end }}
        {{- if .Values.tenants.existingConfigMap }}
        - name: tenants
          mountPath: /etc/tandem-tenants
          readOnly: true
        {{- end }}
  volumes:
    {{- include "tandem.volumes" . | nindent 4 }}
    {{- if .Values.worker.autoscaling.enabled }}
    # For KubeRay's container with Ray's autoscaler alone: the server has no access to Kubernetes.
    - name: kubernetes-access
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap:
              name: kube-root-ca.crt
              items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
    {{- with .Values.apiKeys.existingSecret }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
        items:
          - key: {{ $.Values.apiKeys.key }}
            path: keys
    {{- end }}
    {{- with .Values.tls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.tenants.existingConfigMap }}
    - name: tenants
      configMap:
        name: {{ . }}
        items:
          - key: {{ $.Values.tenants.key }}
            path: tenants.toml
    {{- end }}
  {{- with .Values.head.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.head.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.head.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.head.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end }}

{{- define "tandem.workerPod" -}}
metadata:
  labels:
    {{- include "tandem.selectorLabels" . | nindent 4 }}
    app.kubernetes.io/component: worker
  annotations:
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccountName" . }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "tandem.podSecurityContext" . | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "tandem.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [bash, /etc/tandem/worker.sh]
      {{- include "tandem.environment" . | nindent 6 }}
      ports:
        - name: raylet
          containerPort: 6380
      startupProbe:
        tcpSocket: {port: raylet}
        periodSeconds: 5
        failureThreshold: {{ div .Values.startupTimeoutSeconds 5 }}
      livenessProbe:
        tcpSocket: {port: raylet}
        periodSeconds: 10
      securityContext:
        {{- include "tandem.containerSecurityContext" . | nindent 8 }}
      resources:
        {{- $resources := deepCopy .Values.worker.resources }}
        {{- if gt (int .Values.worker.gpus) 0 }}
        {{- $limits := merge (dict "nvidia.com/gpu" (int .Values.worker.gpus)) ($resources.limits | default dict) }}
        {{- $_ := set $resources "limits" $limits }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "tandem.volumes" . | nindent 4 }}
  {{- with .Values.worker.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.worker.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.worker.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      {{- if not .labelSelector }}
      labelSelector:
        matchLabels:
          {{- include "tandem.selectorLabels" $ | nindent 10 }}
          app.kubernetes.io/component: worker
      {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
